"""Classes of notebooks and scripts, which no other process can import; `fedsim.api.parts` puts them
here by name."""
