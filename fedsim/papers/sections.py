"""The sections of a report that judge what papers print, and the pairs of PNCS's Table I."""

from collections.abc import Sequence
from dataclasses import replace

from fedsim.papers.judge import correct_all, judge_all, verdicts_by_id
from fedsim.papers.pair_claims import judge_conditions, pair_claims_table
from fedsim.papers.pair_study import make_tables, read_conditions
from fedsim.papers.published import RULES
from fedsim.papers.tables import (
    claims_table,
    comparison_table,
    numbers_table,
    omnibus_table,
    totals_table,
)
from fedsim.report.sections import Material, Section
from fedsim.results.grouping import run_key
from fedsim.results.runs import Run


def verdicts(material: Material) -> Section:
    """Return the verdicts on the papers whose presets were run."""
    compared = correct_all(judge_all(_shown_runs(material)))
    if not compared:
        return Section()
    judged = [judgement for _, judgements in compared for judgement in judgements]
    totals = totals_table(compared)
    comparison = comparison_table(judged)
    return Section(
        tables=[
            comparison,
            totals,
            numbers_table(judged),
            omnibus_table(judged),
            claims_table(judged),
        ],
        brief=[comparison, replace(totals, rules="")],
        verdicts=verdicts_by_id(judged),
        measures=[judgement.printed.measure for judgement in judged],
        sources=[f"{publication.title}: {publication.source}" for publication, _ in compared],
        rules=list(RULES.values()),
    )


def _shown_runs(material: Material) -> Sequence[Run]:
    """Return the runs of the methods that the report shows.

    The frame has each distinct run once. Here, a run that belongs to several presets is there for
    each of them.
    """
    if not material.presentation.only:
        return material.runs
    shown = {run_key(run) for run in material.frame["run"]}
    return [run for run in material.runs if run_key(run) in shown]


def pairs(material: Material) -> Section:
    """Return what runs of the pair study say about features of pairs of gradients."""
    conditions = read_conditions(list(material.frame["run"]))
    judged = judge_conditions(*conditions)
    tables = [pair_claims_table(judged), *make_tables(*conditions)]
    return Section(tables, verdicts=verdicts_by_id(judged))
