"""From the words of a command line to checked plans, and from a plan's config to objects."""
