"""Training of drafters: data, features, objectives, the trainer."""
