"""Secure aggregation: the server learns sums over clients, ring by ring, and no single update.

``session.py`` says what a round is about, ``client.py`` and ``server.py`` are the two sides of the
protocol, and ``quantization.py`` turns changes of weights into the integers that are summed. The
others are tools: Shamir's shares, key agreement, masks, and the graph of who shares masks.

The settings can be imported without the package ``cryptography``; everything else needs it.
"""

from __future__ import annotations

from fedquilt.federation.secure.settings import SecureAggregation

__all__ = ["SecureAggregation"]
