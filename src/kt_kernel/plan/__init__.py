"""What a model needs, what it will do on this machine, and what would have to change for it to fit."""
