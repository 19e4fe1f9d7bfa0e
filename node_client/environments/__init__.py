"""What a user's episode runs in: finite states, finite actions, a fixed horizon."""
