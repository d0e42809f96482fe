"""The tables and the picture of docs/results/leaderboard.md, from the cells of `bench_leaderboard.py`."""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from common import pyplot
from leaderboard_settings import Setting
from result_ages import RESULTS, ROOT

from weft.core.sim.study.leaderboard import DEFAULT, Rival, rivals

PAGE: Final = ROOT / RESULTS / "leaderboard.md"
BEGIN: Final = "<!-- make results writes from here -->"
END: Final = "<!-- to here -->"
Figures = Mapping[str, float]
Cells = dict[tuple[Setting, int], dict[Rival, Figures]]  # by setting and seed
# Times, of which less is better, by name.
TIMES: Final = {
    "mean": "mean_s",
    "p95": "p95_s",
    "p99": "p99_s",
    "worst": "worst_s",
    "per token": "token_mean_s",
    "per token p95": "token_p95_s",
    "per token p99": "token_p99_s",
    "per token worst": "token_worst_s",
}
LOSS: Final = 1.02  # a ratio above this is a loss
_NO_ORACLES: Final = {each for each in rivals(host=True) if not each.is_oracle}
_TICKS: Final = (0.5, 0.7, 1, 1.5, 2, 3, 5)


def is_plain(rival: Rival) -> bool:
    """Whether anybody could build it in a day."""
    return rival.is_plain


def knows_no_future(rival: Rival) -> bool:
    """Whether it is another than the default, and no oracle."""
    return not rival.is_oracle and rival != DEFAULT


def has_no_host(rival: Rival) -> bool:
    """Whether it is plain, and has no host memory."""
    return rival.is_plain and not rival.host


def best(rows: Mapping[Rival, Figures], measure: str, among: Callable[[Rival], bool]) -> Rival:
    """The rival with the smallest time of a measure."""
    return min(filter(among, rows), key=lambda rival: rows[rival][measure])


def to_best(
    rows: Mapping[Rival, Figures], measure: str, among: Callable[[Rival], bool], rival: Rival = DEFAULT
) -> float:
    """A rival's time ÷ that of the best one."""
    return rows[rival][measure] / rows[best(rows, measure, among)][measure]


class Loss(NamedTuple):
    """Where a plain rival is ahead of the default."""

    ratio: float
    setting: Setting
    measure: str
    rival: Rival


def losses(cells: Cells) -> list[Loss]:
    """Where the default takes longer than the best plain rival, the largest loss first."""
    found = [
        Loss(ratio, setting, name, best(rows, measure, is_plain))
        for (setting, _), rows in cells.items()
        for name, measure in TIMES.items()
        if (ratio := to_best(rows, measure, is_plain)) > LOSS
    ]
    return sorted(found, reverse=True)


def write_page(path: Path, cells: Cells, commit: str, wanted: int) -> None:
    """Write what lies between the two marks of a page, and the picture next to it.

    Args:
        path: The page. If there is none, it has nothing else.
        cells: The figures that are known. Settings without the default are left out.
        commit: At which they were made.
        wanted: How many cells a whole run has.
    """
    complete = {key: rows for key, rows in cells.items() if DEFAULT in rows and any(map(is_plain, rows))}
    if not complete:
        return
    text = path.read_text(encoding="utf-8") if path.exists() else f"{BEGIN}\n{END}\n"
    before, _, rest = text.partition(BEGIN)
    lines = _lines(complete, commit, sum(map(len, cells.values())), wanted, path.stem)
    made = "\n".join(line if line.startswith(("|", "#", "!")) else _wrapped(line) for line in lines)
    path.write_text(f"{before}{BEGIN}\n\n{made}\n\n{END}{rest.partition(END)[2]}", encoding="utf-8")
    plot(complete, path.with_suffix(".svg"))


def _wrapped(text: str) -> str:
    """Prose in lines of 125 characters, with an empty line before and after it where it had one."""
    filled = textwrap.fill(text.strip(), 125, break_on_hyphens=False)
    before, after = ("\n" * found for found in (text.startswith("\n"), text.endswith("\n")))
    return f"{before}{filled}{after}"


def _lines(cells: Cells, commit: str, known: int, wanted: int, name: str) -> Iterator[str]:
    found = losses(cells)
    places = {loss.setting for loss in found if loss.measure == "mean"}
    yield "## Where the default loses\n"
    yield (
        f"In {len(places)} of {len({setting for setting, _ in cells})} settings the default's mean completion time is "
        f"more than {100 * (LOSS - 1):.0f} % above that of the best plain rival there. All ratios above that, by "
        "setting; a p99 of so few programs is nearly the worst one:\n"
    )
    yield from _table(
        ("setting", *TIMES, "ahead in the mean, or else in the worst measure"), _loss_rows(found), "nowhere"
    )
    yield f"\nMade at {commit}.\n"
    yield "## By source\n"
    yield (
        "Geometric means over the settings and samples of a source, and the worst of them: the default's mean "
        "completion time ÷ the best plain rival's, ÷ that of the best of all rivals that do not know the future, and "
        "last without host memory ÷ the best plain rival without it.\n"
    )
    yield from _table(
        ("source", "settings", "÷ best plain", "worst", "÷ best of all", "worst", "no host ÷ best plain", "worst"),
        _source_rows(cells),
    )
    yield f"\nMade at {commit}.\n"
    yield f"![The default ÷ the best plain rival, by source]({name}.svg)\n"
    yield "## By rival\n"
    yield (
        "Each rival ÷ the default in the settings in which it was run: geometric means. Above 1 the default is ahead. "
        "The number of settings differs, because a run may be cut off.\n"
    )
    yield from _table(("rival", "settings", *TIMES), _rival_rows(cells))
    yield f"\nMade at {commit}.\n"
    yield "## By setting\n"
    yield (
        "The default's figures, in brackets those of the plain rival with the least mean: the mean in seconds, "
        "programs an hour within three times their time on an idle engine, the share of prompt tokens found, and "
        "millions of tokens computed again.\n"
    )
    yield from _table(
        ("setting", "best plain", "mean, s", "÷", "p99 ÷", "per token ÷", "in time, 1/h", "found, %", "again, M"),
        _setting_rows(cells),
    )
    share = f"all {wanted:,}" if known == wanted else f"{known:,} of {wanted:,}"
    yield f"\nMade at {commit}. These are {share} cells of the run that was asked for."


def _table(heading: Sequence[str], rows: Iterator[Sequence[str]], nothing: str = "") -> Iterator[str]:
    found = list(rows)
    if not found:
        yield nothing
        return
    yield f"| {' | '.join(heading)} |"
    yield "|---" * len(heading) + "|"
    for row in found:
        yield f"| {' | '.join(row)} |"


def _loss_rows(found: Sequence[Loss]) -> Iterator[Sequence[str]]:
    by_setting: dict[Setting, list[Loss]] = {}
    for loss in found:
        by_setting.setdefault(loss.setting, []).append(loss)
    for setting, rows in sorted(by_setting.items(), key=lambda each: -max(loss.ratio for loss in each[1])):
        ratios = {name: max((loss.ratio for loss in rows if loss.measure == name), default=None) for name in TIMES}
        ahead = min(rows, key=lambda loss: (loss.measure != "mean", -loss.ratio)).rival.name
        yield str(setting), *("" if each is None else f"{each:.2f}" for each in ratios.values()), ahead


def _source_rows(cells: Cells) -> Iterator[Sequence[str]]:
    sources = dict.fromkeys(setting.source for setting, _ in cells)
    for source in [*sources, "all"]:
        rows = [each for (setting, _), each in cells.items() if source in {setting.source, "all"}]
        columns = [
            [to_best(each, "mean_s", is_plain) for each in rows],
            [to_best(each, "mean_s", knows_no_future) for each in rows if each.keys() >= _NO_ORACLES],
            [
                to_best(each, "mean_s", has_no_host, DEFAULT.without_host())
                for each in rows
                if DEFAULT.without_host() in each
            ],
        ]
        yield (source, str(len(rows)), *(text for column in columns for text in _mean_and_worst(column)))


def _mean_and_worst(ratios: Sequence[float]) -> tuple[str, str]:
    return (f"{statistics.geometric_mean(ratios):.2f}", f"{max(ratios):.2f}") if ratios else ("not run", "")


def _rival_rows(cells: Cells) -> Iterator[Sequence[str]]:
    ratios: dict[Rival, list[dict[str, float]]] = {}
    for rows in cells.values():
        for rival, figures in rows.items():
            row = {name: figures[measure] / rows[DEFAULT][measure] for name, measure in TIMES.items()}
            ratios.setdefault(rival, []).append(row)
    means = {
        rival: {name: statistics.geometric_mean([row[name] for row in found]) for name in TIMES}
        for rival, found in ratios.items()
    }
    for rival, row in sorted(means.items(), key=lambda each: each[1]["mean"]):
        yield rival.name, str(len(ratios[rival])), *(f"{row[name]:.2f}" for name in TIMES)


def _setting_rows(cells: Cells) -> Iterator[Sequence[str]]:
    for (setting, _), rows in cells.items():
        rival = best(rows, "mean_s", is_plain)
        ours, theirs = rows[DEFAULT], rows[rival]
        yield (
            str(setting),
            rival.name,
            f"{ours['mean_s']:,.1f} ({theirs['mean_s']:,.1f})",
            *(f"{to_best(rows, TIMES[name], is_plain):.2f}" for name in ("mean", "p99", "per token")),
            f"{3600 * ours['slo_throughput']:,.0f} ({3600 * theirs['slo_throughput']:,.0f})",
            f"{100 * ours['prefix_hits']:.0f} ({100 * theirs['prefix_hits']:.0f})",
            f"{ours['recomputed_tokens'] / 1e6:.1f} ({theirs['recomputed_tokens'] / 1e6:.1f})",
        )


def plot(cells: Cells, path: Path) -> None:
    """The default ÷ the best plain rival, a point for each setting and sample: mean, p99 and per token, by source."""
    plt = pyplot()
    sources = list(dict.fromkeys(setting.source for setting, _ in cells))[::-1]
    names = ("mean", "p99", "per token")
    figure, axes = plt.subplots(
        1, len(names), figsize=(9, 1.2 + 0.35 * len(sources)), sharey=True, layout="constrained"
    )
    for axis, name in zip(axes, names, strict=True):
        for (setting, _), rows in cells.items():
            ratio = to_best(rows, TIMES[name], is_plain)
            color = "tab:red" if ratio > LOSS else "tab:blue"
            axis.plot(ratio, sources.index(setting.source), "o", alpha=0.6, color=color)
        axis.axvline(1, color="0.5", linewidth=0.8)
        axis.set(xscale="log", title=name)
        axis.set_xticks(_TICKS, [f"{tick:g}" for tick in _TICKS])
        axis.minorticks_off()
    axes[0].set_yticks(range(len(sources)), sources)
    figure.supxlabel("the default ÷ the best plain rival of the setting")
    with plt.rc_context({"svg.fonttype": "none"}):
        figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
