"""Differential privacy: what a user asks for, what it costs, and the parts that keep it."""

from __future__ import annotations

from fedquilt.federation.privacy.accountant import Accountant, PrivacySpent
from fedquilt.federation.privacy.mechanism import AdaptClip, PrivateMean
from fedquilt.federation.privacy.noise import draw_noise, make_secret
from fedquilt.federation.privacy.settings import Privacy

__all__ = [
    "Accountant",
    "AdaptClip",
    "Privacy",
    "PrivacySpent",
    "PrivateMean",
    "draw_noise",
    "make_secret",
]
