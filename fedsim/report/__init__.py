"""Reports over finished runs: tables, figures, statistics, and the papers' numbers with a verdict.

Data flows one way: `runs` reads folders, `groups` puts runs together that differ by seed alone, `measures` takes
numbers of a run, `statistics` compares them. `published` holds what papers print, `protocol` says whether runs are
those of a preset, `rules` how a number or claim is judged, `verdicts` judges. `tables`, `figures` and `page` show it
all.
"""
