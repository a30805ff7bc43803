"""From a checked plan to records: one run.

    process        settings of the process that make torch faster
    signals        Ctrl-C and what clusters send: a run finishes its round and is saved
    exits          exit codes, and what stderr says of errors

One run:

    prepared_data  its data as its model sees them, kept for the next run
    assembly       the simulation from the plan
    experiment     the rounds, or those that are missing, and their records
    checkpoint     its whole state in one file; encoding: that state as JSON and tensors;
                   checkpoint_fields: types and ranges of what is loaded
    user_code      classes of the user's that it is made of, as a text that changes with their source
    incidents      what it survived, told once and counted
    failures       how exceptions end it, before its rounds and later
    results        what it leaves at its end
    environment    versions and machine, for its summary; revision: the commit of fedsim
    outcome        how it ended
    watch          who is told of its rounds
    interleaving   several side by side in one process, in common batches

One command over several processes (fedsim.distributed):

    torchrun       rank 0 does what the command says, the others serve it
    ranks          the processes of rank 0's command: joined, agreed on the jobs, and given their parts
    rank_worker    what the others do
"""
