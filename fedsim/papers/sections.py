"""The sections of a report that judge what papers print, and the pairs of PNCS's Table I."""

from dataclasses import replace

from fedsim.papers.judge import correct_all, examine_all, verdicts_by_id
from fedsim.papers.pair_claims import claims_table, judge_conditions
from fedsim.papers.pair_study import make_tables, read_conditions
from fedsim.papers.published import RULES
from fedsim.papers.tables import all_numbers, beside, claims, numbers, totals
from fedsim.report.sections import Material, Section


def verdicts(material: Material) -> Section:
    """Return the verdicts on the papers whose presets were run."""
    compared = correct_all(examine_all(material.runs))
    if not compared:
        return Section()
    judged = [judgement for _, judgements in compared for judgement in judgements]
    table = totals(compared)
    first = beside(judged)
    return Section(
        tables=[first, table, numbers(judged), all_numbers(judged), claims(judged)],
        brief=[first, replace(table, rules="")],
        verdicts=verdicts_by_id(judged),
        measures=[judgement.printed.measure for judgement in judged],
        sources=[f"{publication.title}: {publication.source}" for publication, _ in compared],
        rules=list(RULES.values()),
    )


def pairs(material: Material) -> Section:
    """Return what runs of the pair study say about features of pairs of gradients."""
    conditions = read_conditions(list(material.frame["run"]))
    judged = judge_conditions(*conditions)
    tables = [claims_table(judged), *make_tables(*conditions)]
    return Section(tables, verdicts=verdicts_by_id(judged))
