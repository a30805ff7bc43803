"""Reports over finished runs: tables, figures, statistics, and a comparison with the papers' numbers."""
