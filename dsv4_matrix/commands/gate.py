"""``dsv4-matrix gate``: its options, for the package ``gate_command``."""

from __future__ import annotations

import argparse

from dsv4_matrix.commands import Add


def add_commands(add: Add) -> None:
    """Register the command with ``add``."""
    made = add("gate", _gate, "run every covered case twice, all changed that must not matter, and compare the bits")
    made.add_argument("--backend", metavar="NAME|module:attr", help="backend under test (default: the one installed)")
    made.add_argument("--reference", metavar="NAME|module:attr", help="reference to judge by (default: the one)")
    made.add_argument("--cells", metavar="EXPR", help="fnmatch patterns on case ids, comma means or: 'r4-*'")
    made.add_argument(
        "--level",
        choices=("L0", "L1", "L2", "L3", "L4"),
        default="L2",
        help="what the second run differs in; cells that promise less are left out (default: L2, the batch)",
    )
    made.add_argument(
        "-n",
        dest="workers",
        type=int,
        default=4,
        metavar="N",
        help="processes of the second run; the first has half (default: 4)",
    )
    made.add_argument("--every", type=int, default=1, metavar="K", help="one case in K, the same ones every day")
    made.add_argument("--minimum", type=int, metavar="N", help="rows to compare at least (default: two a case)")
    made.add_argument("--devices", metavar="X,Y", help="with L4: entries of CUDA_VISIBLE_DEVICES for the two runs")
    made.add_argument(
        "--folder", metavar="DIR", default="build/gate", help="for reports and verdict (default: build/gate)"
    )
    made.add_argument("--record", metavar="DIR", help="write the verdict there as evidence; of the whole matrix only")
    made.add_argument(
        "--router", metavar="module:attr", help="who runs what, as dsv4_matrix.routing.Router (default: by static cost)"
    )
    made.add_argument("--require-gpu", action="store_true", help="fail where there is no usable GPU")


def _gate(args: argparse.Namespace) -> int:
    from dsv4_matrix.gate_command.session import gate

    return gate(
        matrix=args.matrix,
        backend=args.backend,
        reference=args.reference,
        cells=args.cells,
        level=args.level,
        workers=args.workers,
        every=args.every,
        minimum=args.minimum,
        devices=args.devices,
        folder=args.folder,
        record=args.record,
        router=args.router,
        require_gpu=args.require_gpu,
    )
