"""The tables of a report.

`table` is the type, with its output as terminal text, Markdown, LaTeX and CSV; `formatting` turns numbers into the text
of a cell. `results` holds the tables about runs, `times` those about their cost, `papers` those that set runs beside a
paper.
"""
