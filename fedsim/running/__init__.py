"""One run: its parts from a checked plan, its rounds, its checkpoints, how it ends, and what it
depends on."""
