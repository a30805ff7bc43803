"""Classes of notebooks and scripts, which no other process can import. `fedsim.api.parts` stores
them here by name."""
