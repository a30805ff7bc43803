"""Reports over finished runs: tables, figures, statistics, and the papers' numbers with a verdict.

Data flows one way: `runs` reads folders, `groups` puts runs together that differ by seed alone, `measures` takes
numbers of a run, `statistics` compares them, `published` and `verdicts` set them beside a paper's, `tables`, `figures`
and `page` show it all.
"""
