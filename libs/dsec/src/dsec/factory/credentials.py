"""Credentials, known by how they look."""

from __future__ import annotations

import re
from typing import Final

#: What services give out has marks of its own. A text without any of the marks is not searched.
PATTERNS: Final[dict[str, tuple[tuple[bytes, ...], re.Pattern[bytes]]]] = {
    name: (marks, re.compile(pattern))
    for name, marks, pattern in (
        (
            "a private key",
            (b"PRIVATE KEY",),
            rb"-----BEGIN (?:[A-Z0-9]+ )*PRIVATE KEY(?: BLOCK)?-----\s+[\w+/=:]",
        ),
        ("an AWS access key", (b"AKIA", b"ASIA"), rb"\b(?:AKIA|ASIA)[A-Z2-7]{16}\b"),
        (
            "an AWS secret",
            (b"aws_secret", b"AWS_SECRET"),
            rb"(?i)aws_secret_access_key\W{1,8}[A-Za-z0-9/+]{40}\b",
        ),
        (
            "a GitHub token",
            (b"ghp_", b"gho_", b"ghu_", b"ghs_", b"ghr_", b"github_pat_"),
            rb"\b(?:gh[pousr]_[A-Za-z0-9]{36,}|github_pat_[A-Za-z0-9_]{60,})",
        ),
        ("a GitLab token", (b"glpat-",), rb"\bglpat-[A-Za-z0-9_-]{20,}"),
        (
            "an npm token",
            (b"npm_", b"_authToken"),
            rb"\bnpm_[A-Za-z0-9]{36}\b|_authToken\s*=\s*[A-Za-z0-9_-]{20,}",
        ),
        ("a PyPI token", (b"pypi-AgE",), rb"\bpypi-AgE[A-Za-z0-9_-]{50,}"),
        ("a Slack token", (b"xox",), rb"\bxox[abeprs]-[0-9A-Za-z-]{20,}"),
        (
            "a model provider's key",
            (b"sk-",),
            rb"\bsk-(?=[A-Za-z0-9_-]*[0-9])(?:ant-|proj-|or-)?[A-Za-z0-9_-]{32,}",
        ),
        ("a Hugging Face token", (b"hf_",), rb"\bhf_[A-Za-z0-9]{34,}\b"),
        ("a Google key", (b"AIza",), rb"\bAIza[A-Za-z0-9_-]{35}\b"),
        ("a JSON web token", (b"eyJ",), rb"\beyJ[\w-]{20,}\.eyJ[\w-]{20,}\.[\w-]{20,}"),
        ("a NATS seed", (b"NKEY SEED",), rb"-----BEGIN \w+ NKEY SEED-----\s+S[A-Z2-7]{50}"),
        (
            "a password in an address",
            (b"://",),
            (
                rb"://[^\s/:@'\"<>{}$]{1,64}:(?!password|pass\b|token|x-oauth|\*|\.\.\.)"
                rb"[^\s/@'\"<>{}$]{8,128}@[\w.-]+\.[a-z]{2,}"
            ),
        ),
    )
}

#: Where programs keep them: left out of every environment.
FILES: Final = (
    "**/.ssh",
    "**/.gnupg",
    "**/.aws",
    "**/.kube",
    "**/.azure",
    "**/.netrc",
    "**/.git-credentials",
    "**/.pypirc",
    "**/.docker/config.json",
    "**/.config/gh",
    "**/.config/gcloud",
    "**/.config/git/credentials",
    "**/.vault-token",
)


def credentials_in(data: bytes) -> list[str]:
    """Return what kinds of credentials stand in a text."""
    return [
        name
        for name, (marks, pattern) in PATTERNS.items()
        if any(mark in data for mark in marks) and pattern.search(data)
    ]
