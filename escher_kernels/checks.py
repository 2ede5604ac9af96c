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
CHUNK = 2**23  # elements converted to float64 at a time


def gemm_error(torch: Any, a: Any, b: Any, c: Any, dtype: str, full: bool) -> dict[str, Any]:
    """Judge C = A B against float64 products of the same low-precision inputs. Tensors (M,K), (K,N), (M,N).

    Always: Freivalds on the whole output, x = +-1: per row |Cx - A(Bx)| <= 6 u |C_i|_2 + 2^-25 sqrt(K) (|A| |B| 1)_i.
    `full`: also, on up to 256 rows, relative Frobenius error <= u, and |C - R| <= u |R| + 2^-25 sqrt(K) |A||B| + half
    the smallest subnormal. u is the unit roundoff of the output (bf16 2^-8, fp16 2^-11). Ratios are error / bound: up
    to 1 is right.
    R. Freivalds, "Probabilistic machines can use less running time", IFIP 1977; N. Higham, Accuracy and Stability of
    Numerical Algorithms, 2nd ed., section 3.5, with sqrt(K) for K (rounding errors of random sign).
    """
    u, (m, k), n = UNIT_ROUNDOFF[dtype], a.shape, b.shape[1]
    slack = 2.0**-25 * math.sqrt(k)
    f64 = {"dtype": torch.float64, "device": a.device}
    signs = torch.randint(0, 2, (n,), device=a.device).to(torch.float64) * 2 - 1
    bx, b1 = torch.zeros(k, **f64), torch.zeros(k, **f64)
    columns = max(1, CHUNK // k)
    rows = max(1, CHUNK // max(k, n))
    for j in range(0, n, columns):
        part = b[:, j : j + columns].double()
        bx += part @ signs[j : j + columns]
        b1 += part.abs_().sum(1)
    worst = 0.0
    for i in range(0, m, rows):
        left, got = a[i : i + rows].double(), c[i : i + rows].double()
        miss = (got @ signs - left @ bx).abs()
        allowed = 6 * u * got.norm(dim=1) + slack * (left.abs() @ b1)
        worst = max(worst, _worst(miss / allowed))
    out = {"check": "freivalds", "freivalds_ratio": worst, "ok": worst <= 1}
    if full:
        pick = torch.randperm(m, device=a.device)[:CHECK_ROWS]
        left = a[pick].double()
        difference2, norm2, ratio = 0.0, 0.0, 0.0
        for j in range(0, n, columns):
            part = b[:, j : j + columns].double()
            want = left @ part
            miss = (c[pick, j : j + columns].double() - want).abs_()
            allowed = u * want.abs() + slack * (left.abs() @ part.abs_()) + UNDERFLOW[dtype]
            ratio = max(ratio, _worst(miss / allowed))
            difference2 += float((miss**2).sum())
            norm2 += float((want**2).sum())
        frobenius = math.sqrt(difference2 / norm2)
        out |= {
            "check": "full", "rows_checked": len(pick), "elementwise_ratio": ratio, "rel_frobenius": frobenius,
            "rel_frobenius_limit": u, "ok": bool(out["ok"] and ratio <= 1 and frobenius <= u),
        }  # fmt: skip
    not_finite = [name for name, v in out.items() if isinstance(v, float) and not math.isfinite(v)]
    return out | dict.fromkeys(not_finite) | ({"not_finite": not_finite} if not_finite else {})


def _worst(ratios: Any) -> float:
    """Largest ratio; infinity where any is NaN, so that a poisoned output can never pass."""
    largest = float(ratios.max())
    return math.inf if math.isnan(largest) else largest
