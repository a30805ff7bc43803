"""From a checked plan to records: one run."""
