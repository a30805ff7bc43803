"""The papers' printed numbers and claims, and whether finished runs reproduce them.

published    reads what papers print (published/*.yaml)
rules        says how numbers and claims are judged, in words
evidence     two p-values for each, the verdict that follows, Holm's correction
values       the rules about single values: printed numbers, "about" a value, bounds
comparisons  the rules about differences between methods
cases        finds the runs that a claim is about, and says whether they may be judged
examine      from runs to evidence
judge        from evidence to verdicts, corrected for each paper
seeds        how many seeds would decide what is open
omnibus      all numbers of a table at once
"""
