"""Turning logits into text: sampling, the on-device loop, stopping, and the engine around them."""
