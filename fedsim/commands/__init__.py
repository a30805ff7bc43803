"""The commands of `fedsim` besides running jobs (`table` has them all). They import only what they
need."""
