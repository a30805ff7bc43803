"""From the words of a command line to checked plans, and from a plan's config to objects.

The command line and conf/ become the configs of all jobs:

    command_line    Hydra's flags, and the overrides beside them
    overrides       overrides by Hydra's grammar, and the jobs of a sweep over them
    shipped         where conf/ is
    choice_files    the files of choices, with what their defaults lists add, read without Hydra
    choice_content  what one such file says
    sources         files of configs, which may come from a stranger, as Hydra reads them
    plugins         Hydra's plugins, without those of the working folder
    interpolations  what `${...}` may do
    hydra_node      what a config may say to Hydra itself; submitit_options: launchers whose parameters are ours
    diagnosis       one composition by Hydra, with its first mistake
    presets         what a preset implies: a name, and the sizes of `scale`
    compose         all jobs of a command

Configs become plans:

    settings        the top-level keys, their types and rules
    build           config nodes become objects: names, types, classes
    positional      what fedsim itself passes to constructors
    typecheck       whether a value fits an annotation
    origin          which modules a config may have imported
    moved           earlier paths of classes, and keys that came later
    populations     the clients that a selector is checked with
    model_check     what is wrong with the values of a model, before there are data
    plan            one run, checked, and the name of its folder
    check           the plans of all jobs, or all of their problems; whole_config: those of one config

Mistakes are told all at once, in terms of what was typed:

    mistakes        all mistakes of a command line
    lacking         keys that a preset sets and a chosen part lacks
    stand_ins       values in the place of those that are not known
    suggestions     what may have been meant; spelling: the nearest known word
    stray_files     the file of a choice that is near, but not where choices are read

    nested          nested mappings and dotted keys
"""
