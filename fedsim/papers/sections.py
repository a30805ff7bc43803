"""The sections of a report that judge what papers print, and the pairs of PNCS's Table I."""

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


def verdicts(material: Material) -> Section:
    """Return the verdicts on the papers whose presets were run."""
    compared = correct_all(judge_all(material.runs))
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


def pairs(material: Material) -> Section:
    """Return what runs of the pair study say about features of pairs of gradients."""
    conditions = read_conditions(list(material.frame["run"]))
    judged = judge_conditions(*conditions)
    tables = [pair_claims_table(judged), *make_tables(*conditions)]
    return Section(tables, verdicts=verdicts_by_id(judged))
