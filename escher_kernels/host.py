"""What this host grants a process: the control groups it is in, and the memory that it may really use. No torch.

Families that must not import each other, and the process that looks for them how much memory there is, all ask here.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

INACTIVE_FILE = re.compile(r"^(?:total_)?inactive_file (\d+)", re.M)


def text(path: Path) -> str | None:
    """Contents of a small file without the blanks around, or None where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None


def cgroup_dirs(root: Path, controller: str) -> list[Path]:
    """This process's control group for `controller` and its ancestors, deepest first, v2 and v1."""
    out = []
    for line in (text(root / "proc/self/cgroup") or "").splitlines():
        _, _, rest = line.partition(":")
        names, _, path = rest.partition(":")
        if names == "":
            bases = [root / "sys/fs/cgroup", root / "sys/fs/cgroup/unified"]
        elif controller in names.split(","):
            bases = [root / "sys/fs/cgroup" / names, root / "sys/fs/cgroup" / controller]
        else:
            continue
        for base in bases:
            group = base / path.strip("/")
            out += [p for p in [group, *group.parents] if p == base or base in p.parents]
    return out


def memory(root: Path = Path("/")) -> dict[str, Any]:
    """Bytes of memory: of the host, the tightest control group's limit, what is usable, and what bounds it.

    `usable_bytes` = min(available on the host, limit - used in that group without file cache that can be dropped).
    """
    meminfo = dict(re.findall(r"^(\w+):\s+(\d+) kB", text(root / "proc/meminfo") or "", re.M))
    total = int(meminfo["MemTotal"]) * 1024 if "MemTotal" in meminfo else None
    available = int(meminfo["MemAvailable"]) * 1024 if "MemAvailable" in meminfo else None
    out = {"total_bytes": total, "available_bytes": available, "limit_bytes": None, "bounded_by": "host"}
    usable = available
    for group in cgroup_dirs(root, "memory"):
        for limit_file, used_file in (
            ("memory.max", "memory.current"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            limit, used = text(group / limit_file), text(group / used_file)
            if not limit or not limit.isdigit() or (total and int(limit) >= total):
                continue
            droppable = max(map(int, INACTIVE_FILE.findall(text(group / "memory.stat") or "")), default=0)
            in_use = max(0, int(used) - droppable) if used and used.isdigit() else 0
            left = max(0, int(limit) - in_use)
            if out["limit_bytes"] is None or int(limit) < out["limit_bytes"]:
                out["limit_bytes"] = int(limit)
            if usable is None or left < usable:
                usable, out["bounded_by"] = left, f"control group {group}"
    return {**out, "usable_bytes": usable}
