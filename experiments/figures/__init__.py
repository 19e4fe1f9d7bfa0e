"""The papers' figures, computed anew: `catalogue` says what they are, `sweep` computes them."""
