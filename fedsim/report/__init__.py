"""Reports over finished runs: tables, figures, one page."""
