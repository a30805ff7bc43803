"""The papers' printed numbers and claims, and whether finished runs reproduce them.

`published` reads what papers print (published/*.yaml), `rules` says how a number or a claim is judged, `judge` applies
the rules to runs.
"""
