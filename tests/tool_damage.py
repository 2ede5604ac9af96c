"""Logs of copy tools, whole and damaged, and what must hold of whatever a parser says of them."""

from pathlib import Path
from types import ModuleType

from hypothesis import strategies as st

from validation import tools

STATUSES = (None, tools.UNPARSED, tools.INCOMPLETE, tools.UNSUPPORTED, tools.FAIL, tools.INVALID)


def logs(tool: str) -> dict[str, str]:
    """Name to text of every fixture of a tool."""
    found = sorted((Path(__file__).parent / "fixtures" / "tools" / tool).iterdir())
    return {p.name: tools.clean(p.read_bytes()) for p in found}


@st.composite
def damaged(draw: st.DrawFn, texts: list[str]) -> str:
    """One of the texts after one accident: cut, a line lost, twice or broken by another, twice as a whole, or coloured."""
    text = draw(st.sampled_from(texts))
    lines = text.split("\n")
    i, j = (draw(st.integers(0, len(lines) - 1)) for _ in range(2))
    kind = draw(st.sampled_from(("cut", "lost", "twice", "spliced", "broken", "moved", "doubled", "coloured", "commas", "nan")))
    if kind == "cut":
        return text[: draw(st.integers(0, len(text)))]
    if kind == "lost":
        return "\n".join(lines[:i] + lines[i + 1 :])
    if kind == "twice":
        return "\n".join(lines[: i + 1] + lines[i:])
    if kind == "spliced":  # two lines of two threads in one
        at, other = draw(st.integers(0, len(lines[i]))), draw(st.integers(0, len(lines[j])))
        return "\n".join([*lines[:i], lines[i][:at] + lines[j][other:], *lines[i + 1 :]])
    if kind == "broken":
        at = draw(st.integers(0, len(lines[i])))
        return "\n".join([*lines[:i], lines[i][:at] + "NCCL WARN a message of another library", lines[i][at:], *lines[i + 1 :]])
    if kind == "moved":
        rest = lines[:i] + lines[i + 1 :]
        return "\n".join(rest[:j] + [lines[i]] + rest[j:])
    if kind == "coloured":
        return "\n".join(f"\x1b[1;32m{line}\x1b[0m\r" for line in lines)
    if kind == "commas":
        return "".join("," if c == "." and text[k - 1 : k].isdigit() else c for k, c in enumerate(text))
    if kind == "nan":
        return "\n".join([*lines[:i], " ".join("-nan" if "." in w else w for w in lines[i].split(" ")), *lines[i + 1 :]])
    return text + text


def check(module: ModuleType, text: str) -> tools.Parsed:
    """What the module says of the text, which must be legal, and hold no figure that does not stand in the text."""
    parsed = module.parse(text)
    cleaned = tools.clean(text)
    assert parsed.status in STATUSES
    assert (parsed.status is None) == (parsed.reason == "")
    assert "\n" not in parsed.reason
    for r in parsed.records:
        figure = r.reported["text"]
        assert figure in cleaned and float(figure) == r.reported["value"] > 0
        assert r.params["statistic"] in tools.STATISTICS and r.params["counted"] in tools.COUNTED
        assert r.reported["unit"] in tools.UNITS
    return parsed


def check_fixture(module: ModuleType, others: tuple[ModuleType, ...], text: str, expected: tuple) -> None:
    """A whole log gives what is expected (status, how many readings, some of them), redacted too; others leave it alone."""
    status, count, some = expected
    parsed = check(module, text)
    assert (parsed.status, len(parsed.records), parsed.rejected_lines) == (status, count, 0)
    assert not [reading for reading in some if reading not in figures(parsed)]
    assert not any(r.flags for r in parsed.records)
    assert figures(module.parse(tools.redact(text))) == figures(parsed)  # as it is kept
    assert module.recognises(text) and not any(other.recognises(text) for other in others)


def figures(parsed: tools.Parsed) -> list[tuple]:
    """The readings as plain tuples: case, op, source, destination, figure, statistic."""
    return [
        (r.case, r.params["op"], r.params.get("src"), r.params.get("dst"), r.reported["text"], r.params["statistic"])
        for r in parsed.records
    ]
