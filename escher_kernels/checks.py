"""Is a result right? Judged against float64 from the same low-precision inputs, before and after it is timed.

Every check returns its figures and ``ok``; an error over its bound is up to 1 where the result is right, and a NaN
anywhere is wrong. Shared by all families, so that one bound means the same on every page.
"""

from __future__ import annotations

import math
from typing import Any

UNIT_ROUNDOFF = {"bf16": 2.0**-8, "fp16": 2.0**-11}
UNDERFLOW = {"bf16": 2.0**-134, "fp16": 2.0**-25}  # half the smallest subnormal: what rounding costs a result near zero
CHECK_ROWS = 256
CHUNK = 2**21  # elements converted to float64 at a time: 16 MiB, which an allocator reuses instead of mapping it anew
GELU_SLOPE = 1.13  # the steepest that GELU is
SPLIT = 8  # sqrt of the partial sums that a split reduction may round: their errors have random signs


def gemm_error(
    torch: Any, a: Any, b: Any, c: Any, dtype: str, full: bool, bias: Any = None, split: bool = False,
    rows: int = CHECK_ROWS,
) -> dict[str, Any]:  # fmt: skip
    """Judge C = A B, or A B + bias, against float64 products of the same inputs. Tensors (M,K), (K,N), (M,N), (N).

    Always: Freivalds on the whole output, x = +-1: per row |Cx - A(Bx)| <= 6 u |C_i|_2 + 2^-25 sqrt(K) (|A| |B| 1)_i.
    `full`: also, on up to `rows` rows, relative Frobenius error <= u, and |C - R| <= u |R| + 2^-25 sqrt(K) |A||B| + half
    the smallest subnormal. u is the unit roundoff of the output (bf16 2^-8, fp16 2^-11). A bias is one more term of the
    sums. `split`: partial sums may be rounded to the dtype as well, so the bounds in u are `SPLIT` times as wide, and an
    element may miss by 4 SPLIT u |A_i|_2 |B_j|_2 / sqrt(K), a share of what its sum typically is. Ratios are
    error / bound: up to 1 is right.
    R. Freivalds, "Probabilistic machines can use less running time", IFIP 1977; N. Higham, Accuracy and Stability of
    Numerical Algorithms, 2nd ed., section 3.5, with sqrt(K) for K (rounding errors of random sign).
    """
    u, (m, k), n = UNIT_ROUNDOFF[dtype], a.shape, b.shape[1]
    slack, limit = 2.0**-25 * math.sqrt(k), u * (SPLIT if split else 1)
    f64 = {"dtype": torch.float64, "device": a.device}
    added = torch.zeros(n, **f64) if bias is None else bias.double()
    signs = torch.randint(0, 2, (n,), device=a.device).to(torch.float64) * 2 - 1
    bx, b1 = torch.zeros(k, **f64), torch.zeros(k, **f64)
    columns = max(1, CHUNK // k)
    step = max(1, CHUNK // max(k, n))
    for j in range(0, n, columns):
        part = b[:, j : j + columns].double()
        bx += part @ signs[j : j + columns]
        b1 += part.abs_().sum(1)
    worst = 0.0
    for i in range(0, m, step):
        left, got = a[i : i + step].double(), c[i : i + step].double()
        miss = (got @ signs - left @ bx - added @ signs).abs()
        allowed = 6 * limit * got.norm(dim=1) + slack * (left.abs() @ b1 + added.abs().sum())
        worst = max(worst, _worst(miss / allowed))
    out = {"check": "freivalds", "freivalds_ratio": worst, "ok": worst <= 1}
    if full:
        pick = torch.randperm(m, device=a.device)[:rows]
        left = a[pick].double()
        difference2, norm2, ratio = 0.0, 0.0, 0.0
        for j in range(0, n, columns):
            part, plus = b[:, j : j + columns].double(), added[j : j + columns]
            want = left @ part + plus
            miss = (c[pick, j : j + columns].double() - want).abs_()
            spread = 4 * limit / math.sqrt(k) * torch.outer(left.norm(dim=1), part.norm(dim=0)) if split else 0.0
            allowed = u * want.abs() + slack * (left.abs() @ part.abs_() + plus.abs()) + spread + UNDERFLOW[dtype]
            ratio = max(ratio, _worst(miss / allowed))
            difference2 += float((miss**2).sum())
            norm2 += float((want**2).sum())
        out |= _figures(ratio, difference2, norm2, limit, len(pick), out["ok"])
    return _finite(out)


def batched_error(torch: Any, a: Any, b: Any, c: Any, dtype: str, full: bool) -> dict[str, Any]:
    """Judge each product of a batch by `gemm_error`; the worst counts. Tensors (B,M,K), (B,K,N), (B,M,N).

    The rows of the full check are spread over the batch, at least one a product.
    """
    rows = max(1, CHECK_ROWS // len(a))
    parts = [gemm_error(torch, x, y, z, dtype, full, rows=rows) for x, y, z in zip(a, b, c, strict=True)]
    out = dict(max(parts, key=lambda part: not part["ok"]))  # a wrong one, where there is any
    for name in ("freivalds_ratio", "elementwise_ratio", "rel_frobenius"):
        found = [part[name] for part in parts if name in part]
        if found:
            out[name] = None if None in found else max(found)
    if full:
        out["rows_checked"] = sum(part["rows_checked"] for part in parts)
    return out


def gelu_error(torch: Any, a: Any, b: Any, bias: Any, h: Any, c: Any, dtype: str, full: bool) -> dict[str, Any]:
    """Judge C = GELU(A B + bias), with tanh; h holds A B + bias of the same dtype, from a call of its own.

    Always, on the whole output: h by `gemm_error`, then |C - GELU(h)| <= u |GELU(h)| + 1.13 (2 u |h| +
    2^-24 sqrt(K) (|A_i|_2 |B_j|_2 + |bias|)): both may round what GELU takes, whose slope is at most 1.13. `full`: also,
    on up to 256 rows, C against float64: |C - R| <= u |R| + 1.13 (u |X| + 2^-25 sqrt(K) (|A||B| + |bias|)), X what GELU
    takes, and relative Frobenius error <= 2 u, for two roundings. `elementwise_ratio` is the worst of both.
    """
    u, (m, k), n = UNIT_ROUNDOFF[dtype], a.shape, b.shape[1]
    slack, added = 2.0**-25 * math.sqrt(k), bias.double()
    out = gemm_error(torch, a, b, h, dtype, False, bias)
    norms = torch.linalg.vector_norm(b, dim=0, dtype=torch.float32).double()
    ratio, step = 0.0, max(1, CHUNK // max(k, n))
    for i in range(0, m, step):
        pre, got = h[i : i + step].double(), c[i : i + step].double()
        want = torch.nn.functional.gelu(pre, approximate="tanh")
        sums = torch.outer(a[i : i + step].double().norm(dim=1), norms) + added.abs()
        allowed = u * want.abs() + GELU_SLOPE * 2 * (u * pre.abs() + slack * sums) + UNDERFLOW[dtype]
        ratio = max(ratio, _worst((got - want).abs() / allowed))
    out |= {"elementwise_ratio": ratio, "ok": bool(out["ok"] and ratio <= 1)}
    if full:
        pick = torch.randperm(m, device=a.device)[:CHECK_ROWS]
        left, difference2, norm2 = a[pick].double(), 0.0, 0.0
        columns = max(1, CHUNK // k)
        for j in range(0, n, columns):
            part, plus = b[:, j : j + columns].double(), added[j : j + columns]
            pre = left @ part + plus
            want = torch.nn.functional.gelu(pre, approximate="tanh")
            miss = (c[pick, j : j + columns].double() - want).abs_()
            sums = left.abs() @ part.abs_() + plus.abs()
            allowed = u * want.abs() + GELU_SLOPE * (u * pre.abs() + slack * sums) + UNDERFLOW[dtype]
            ratio = max(ratio, _worst(miss / allowed))
            difference2 += float((miss**2).sum())
            norm2 += float((want**2).sum())
        out |= _figures(ratio, difference2, norm2, 2 * u, len(pick), out["ok"])
    return _finite(out)


def _figures(ratio: float, difference2: float, norm2: float, limit: float, rows: int, ok: bool) -> dict[str, Any]:
    """What a full check adds. `ok`: of the check on the whole output."""
    frobenius = math.sqrt(difference2 / norm2) if norm2 else (0.0 if difference2 == 0 else math.inf)
    return {
        "check": "full", "rows_checked": rows, "elementwise_ratio": ratio, "rel_frobenius": frobenius,
        "rel_frobenius_limit": limit, "ok": bool(ok and ratio <= 1 and frobenius <= limit),
    }  # fmt: skip


def _finite(out: dict[str, Any]) -> dict[str, Any]:
    """JSON knows no infinity: such figures become None and are named."""
    not_finite = [name for name, v in out.items() if isinstance(v, float) and not math.isfinite(v)]
    return out | dict.fromkeys(not_finite) | ({"not_finite": not_finite} if not_finite else {})


def _worst(ratios: Any) -> float:
    """Largest ratio; infinity where any is NaN, so that a poisoned output can never pass."""
    largest = float(ratios.max())
    return math.inf if math.isnan(largest) else largest


def rows_error(got: Any, want: Any, limit: float) -> dict[str, Any]:
    """Relative Frobenius error of sampled rows against their float64 values; null where it is not finite."""
    error = float((got.double() - want).norm() / want.norm())
    finite = math.isfinite(error)
    return {"rel_frobenius": error if finite else None, "rel_frobenius_limit": limit, "ok": finite and error <= limit}
