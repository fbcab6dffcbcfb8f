"""What distinguishes one quantised form of a model from another."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

FORMAT_VERSION = 1
"""Raise it when quantised weights are computed or stored otherwise than before."""


@dataclass(frozen=True)
class QuantizationScheme:
    """How a model is quantised. Models of different schemes share neither files nor measurements.

    Attributes:
        name: The value of the setting `quantization`, "int8".
        bits: Of a weight of a linear layer.
        head: How the output head is stored: "int8", and a tied embedding is looked up in the same values; "half": in 16
            bits.
        folding: The scales of activations that were folded into the weights; "": none.
        version: `FORMAT_VERSION` of the code that quantised.
    """

    name: str = "int8"
    bits: int = 8
    head: str = "int8"
    folding: str = ""
    version: int = FORMAT_VERSION

    def to_dict(self) -> dict[str, Any]:
        """The attributes, as JSON takes them."""
        return asdict(self)
