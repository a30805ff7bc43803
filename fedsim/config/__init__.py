"""From the words of a command line to checked plans, and from a plan's config to objects.

`compose` makes the configs of all jobs of words and files (`words`, `sources`, `hydra_node`,
`diagnosis`), `plan` checks one, and `build` makes its objects. Mistakes are told all at once, in
three stages: of words (`mistakes`), of names and types, and of rules, in terms of what was typed
(`suggestions`).
"""
