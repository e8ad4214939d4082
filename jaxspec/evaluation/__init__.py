"""Measuring drafters: acceptance, speed, exactness, and why acceptance is low."""
