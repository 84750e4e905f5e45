"""Training of drafters: data from a target, features, losses, the loop and offline evaluation."""
