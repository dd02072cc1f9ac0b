"""The errors of the compiled log, cos and sin, for every argument that they can distinguish.

    python experiments/kernel_errors.py            writes experiments/results/kernel_errors.json, in about a minute

docs/guarantees/noise.md, section 3, allows each a relative error of 2⁻²¹. The functions convert their 32 digits to
float32, so there are only about a hundred million different arguments: U from 2⁻¹³ to 1 − 2⁻¹¹, and angles within an
eighth of a turn. The results are compared with the C library's functions in double precision, for each instruction set
for which the loop is compiled.
"""

from __future__ import annotations

import json
import math
import subprocess
import tempfile
from pathlib import Path

from provenance import origin

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "experiments" / "results" / "kernel_errors.json"
FLAGS = ["-O3", "-std=gnu11", "-fno-math-errno", "-fno-trapping-math"]
BUILDS = {"default": [], "x86-64-v3": ["-march=x86-64-v3"], "x86-64-v4": ["-march=x86-64-v4"]}

HARNESS = r"""
#include <stdio.h>
#include "kernels.c"

static void worst(double *most, double found, double exact) {
    double error = fabs(found - exact) / fabs(exact);
    if (error > *most) *most = error;
}

/* the first integer above u that is converted to another float32 */
static uint64_t after(uint64_t u) {
    int bits = 64 - __builtin_clzll(u);
    return bits <= 24 ? u + 1 : ((u >> (bits - 24)) + 1) << (bits - 24);
}

int main(void) {
    double log_error = 0, cos_error = 0, sin_error = 0;
    uint64_t logs = 0, angles = 0;
    for (uint64_t u = 1u << 19; u <= (1ull << 32) - (1u << 21); u = after(u), logs++)
        worst(&log_error, minus_log((uint32_t)u), -log((double)u * 0x1p-32));
    for (uint64_t r = 1; r <= 1u << 29; r = after(r), angles++) {
        float cosine, sine;
        double angle = (double)(float)r * (2.0 * M_PI * 0x1p-32);
        cos_sin((uint32_t)r, &cosine, &sine);
        if (r < 1u << 29) worst(&cos_error, cosine, cos(angle)), worst(&sin_error, sine, sin(angle));
        cos_sin(-(uint32_t)r, &cosine, &sine);
        worst(&cos_error, cosine, cos(angle)), worst(&sin_error, sine, -sin(angle));
    }
    printf("%.17g %.17g %.17g %llu %llu\n", log_error, cos_error, sin_error, (unsigned long long)logs,
           (unsigned long long)angles);
    return 0;
}
"""


def measured(extra: list[str]) -> dict[str, float]:
    """The largest relative errors of one build, as powers of two, and the number of arguments."""
    with tempfile.TemporaryDirectory() as folder:
        source, program = Path(folder) / "harness.c", Path(folder) / "harness"
        source.write_text(HARNESS)
        include = f"-I{ROOT / 'src' / 'sordino' / 'native'}"
        subprocess.run(["gcc", *FLAGS, *extra, include, str(source), "-o", str(program), "-lm"], check=True)
        out = subprocess.run([str(program)], check=True, capture_output=True, text=True).stdout.split()
    log, cos, sin = (math.log2(float(x)) for x in out[:3])
    return {"log": log, "cos": cos, "sin": sin, "logarithms": int(out[3]), "angles": int(out[4])}


def main() -> None:
    results = {}
    for name, extra in BUILDS.items():
        results[name] = measured(extra)
        print(f"{name:10s}", *(f"{k} 2^{v:.2f}" if v < 0 else f"{v:,} {k}" for k, v in results[name].items()))
        RESULTS.write_text(
            json.dumps(
                {
                    **origin("python experiments/kernel_errors.py"),
                    "allowed": -21,
                    "largest relative errors, log2": results,
                },
                indent=1,
            )
            + "\n"
        )


if __name__ == "__main__":
    main()
