"""The rules by which numbers and claims are judged, in words, and the verdicts that they give.

`evidence`, `values` and `comparisons` are the same rules as code; their error rates are simulated in
tests/test_report_errors.py.
"""

from typing import Literal

from fedsim.report.statistics import LEVEL, MIN_SEEDS

Verdict = Literal[
    "reproduced",
    "direction only",
    "consistent with",
    "too wide to tell",
    "not reproduced",
    "undecided",
    "not judged",
]
VERDICTS: tuple[Verdict, ...] = (
    "reproduced",
    "direction only",
    "consistent with",
    "too wide to tell",
    "not reproduced",
    "undecided",
    "not judged",
)

ALPHA = round(1 - LEVEL, 10)
MAJORITY = 0.5
"""A bound on every run is judged by whether it holds for more than this share of runs."""

RULES = {
    "judged": (
        "Only runs that follow the preset in every key that can matter are judged, by their configs; claims about"
        " others need the runs of all of them. At another size than the paper's, numbers and absolute values are not"
        " judged, and printed gains by their sign alone: direction only at best."
    ),
    "number": (
        "A number that a paper prints for one run is taken as one draw. It is reproduced if our mean is equivalent to"
        " it: within the margin of its table by two one-sided tests. It is not reproduced if it is no draw from the"
        " distribution of our runs: it lies outside of the 95 % prediction interval of one more run, and stays so"
        " after correction. If it lies inside of that interval without being shown to be close, it is consistent with"
        " our runs where the interval reaches no further than the margin to each side; where it does, it is too wide to"
        f" tell. Else, and with fewer than {MIN_SEEDS} finished seeds, it is undecided."
    ),
    "value": (
        "A claim that something is about a value is judged as a number, with a tolerance that we give to the word: the"
        " mean lies within it, or the printed run is no draw of ours even with the tolerance. The first round in which"
        " something happens may never come (a censored value, known to be later than the last round): such claims are"
        " about the median, by sign tests: five seeds can say reproduced, it takes six to say not reproduced."
    ),
    "bound": (
        "A claim that every run is at most, or at least, a value is about the share of runs for which it holds."
        " It is reproduced if the exact 95 % interval of that share lies above one half, not reproduced if it lies"
        " below, else undecided. Six seeds that agree are the fewest that decide it, if it is alone in its family; it"
        " takes seven in one of two or three such tests, eight of up to six, ten of up to 25. A run that never gets"
        " there counts as later than its last round; one that ends before the bound says nothing."
    ),
    "gain": (
        "A claim that a method exceeds others is about the smallest of its true mean differences to each of them,"
        " paired at equal seeds (t intervals). All others are compared simultaneously: for the claim each must be"
        " exceeded; against it one comparison is enough, corrected for their number. It is reproduced if the 95 %"
        " interval excludes 0 and holds the printed gain (where one is printed), direction only if it excludes 0 and"
        " does not hold the printed gain, not reproduced if it lies below the printed gain and does not exclude 0"
        " (below 0, where none is printed), else undecided. Claims over several settings are about the mean of the"
        " settings' differences, taken at each seed first, so that seeds are what is counted."
    ),
    "level": (
        "Methods are level with each other if all differences lie within the stated margin (two one-sided tests, that"
        " is, 90 % intervals), and not level if one lies outside of it. A method is not worse than others if the lower"
        " end of the 95 % interval of each difference lies above minus the margin."
    ),
    "trend": "A trend is the mean over seeds of the least-squares slope along the parameter, by its 95 % t interval.",
    "holm": (
        "A family of tests is what a paper says in one place of one quantity: the judged numbers, or the judged claims,"
        " with the same place and measure, over all presets of this report; rows that were written after runs had been"
        " seen are a family by themselves, so that they cannot change the others. In each family the tests for and"
        " those against are corrected by Holm's method, each by themselves: the chance of any false 'reproduced' or"
        " 'direction only' in it is 5 % at most, and so is that of any false 'not reproduced'. Over the paper: the"
        " verdict of the stricter reading, in which all tests of a paper are one family (before and after runs apart)."
    ),
}
