"""Tell a secret by its name or its shape, and blot it out."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

MASK = "[secret]"

# Names are compared in lower case without separators, so apiKey, API_KEY and api-key are one name.
_NAME = re.compile(
    r"(apikey|accesskey|secretkey|privatekey|signingkey|encryptionkey|secret|password|passwd|passphrase|"
    r"credential|authorization|cookie|token)s?$|^(auth|pwd|key|pat|dsn)$"
)
# Counts of tokens are measures, not secrets, and a key_id or public_key is meant to be seen.
_HARMLESS = re.compile(r"(max|min|input|output|prompt|completion|total|cached|fencing|per\w*)tokens?$|^tokens$")

_SHAPES = re.compile(
    r"""
      -----BEGIN[ ][A-Z0-9 ]*PRIVATE[ ]KEY-----.*?(?:-----END[ ][A-Z0-9 ]*PRIVATE[ ]KEY-----|\Z)
    | \bsk-[A-Za-z0-9_-]{12,}                          # OpenAI, Anthropic and those who copied them
    | \b(?:sk|rk|pk)_(?:live|test)_[A-Za-z0-9]{12,}    # Stripe
    | \bgh[pousr]_[A-Za-z0-9]{16,}                     # GitHub
    | \bgithub_pat_[A-Za-z0-9_]{20,}
    | \bglpat-[A-Za-z0-9_-]{16,}                       # GitLab
    | \b(?:AKIA|ASIA)[A-Z0-9]{16}\b                    # Amazon
    | \bAIza[A-Za-z0-9_-]{30,}                         # Google
    | \bxox[abeoprs]-[A-Za-z0-9-]{10,}                 # Slack
    | \bhf_[A-Za-z0-9]{20,}                            # Hugging Face
    | \beyJ[A-Za-z0-9_-]{8,}\.eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]*   # a signed web token
    """,
    re.VERBOSE | re.DOTALL,
)
_BEARER = re.compile(r"(?i)\b(bearer|basic)\s+[A-Za-z0-9._~+/=-]{8,}")
# Greedy up to the last @ before the path: a password may hold an @ of its own.
_URL_PASSWORD = re.compile(r"(?i)\b([a-z][a-z0-9+.-]{0,19}://[^\s/:@]*):([^\s/]+)@")
_ASSIGNED = re.compile(
    r"""(?ix) \b([\w-]{0,40}(?:api[_-]?key|secret|password|passwd|passphrase|access[_-]?token|auth[_-]?token))
        (["']?\s*[=:]\s*["']?) (?!\[secret\]) [^\s"'&,;}]{4,}"""
)
_QUERY = re.compile(r"(?<=[?&])([^=&\s]+)=([^&\s]+)")

_KEY_VARIABLES = {
    "google": "GEMINI_API_KEY",
    "azure": "AZURE_OPENAI_API_KEY",
    "bedrock": "AWS_SECRET_ACCESS_KEY",
}


def is_secret_name(name: str) -> bool:
    """Say whether a field of this name is likely to hold a secret."""
    plain = re.sub(r"[^a-z0-9]", "", name.lower())
    return bool(_NAME.search(plain)) and not _HARMLESS.search(plain)


def has_secret(text: str) -> bool:
    """Say whether the text holds something with the shape of a key; passwords in URLs do not count."""
    return bool(_SHAPES.search(text) or _BEARER.search(text))


def mask_text(text: str, known: Iterable[str] = ()) -> str:
    """Blot out every known secret and everything with the shape of one."""
    for value in known:
        text = text.replace(value, MASK)
    text = _SHAPES.sub(MASK, text)
    text = _BEARER.sub(rf"\1 {MASK}", text)
    text = _URL_PASSWORD.sub(rf"\1:{MASK}@", text)
    return _ASSIGNED.sub(rf"\1\2{MASK}", text)


def mask_url(url: str) -> str:
    """Blot out the password of a URL, and any query value whose name is a secret's."""
    return _QUERY.sub(
        lambda pair: f"{pair[1]}={MASK}" if is_secret_name(pair[1]) else pair[0],
        mask_text(url),
    )


def key_variable(provider: str) -> str:
    """Name the environment variable that carries the key of a provider."""
    usual = re.sub(r"[^A-Z0-9]+", "_", provider.upper()) + "_API_KEY"
    return _KEY_VARIABLES.get(provider, usual)


def known_secrets(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Collect the values of all variables named like secrets, the longest first.

    Values under eight characters are left out: masking `true` or `1` wherever it occurs would ruin every log.
    """
    values = {value for name, value in environ.items() if is_secret_name(name) and len(value) >= 8}
    return tuple(sorted(values, key=len, reverse=True))


@dataclass(frozen=True, slots=True)
class StoreKeys:
    """What opens an S3 store of archives; None for whatever the environment does not say."""

    access_key_id: str | None = None
    secret_access_key: str | None = field(default=None, repr=False)
    session_token: str | None = field(default=None, repr=False)
    region: str | None = None

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> StoreKeys:
        """Take them from SKEP_S3_ACCESS_KEY_ID and its siblings; blank counts as absent."""
        return cls(**{name: environ.get(f"SKEP_S3_{name.upper()}", "").strip() or None for name in cls.__slots__})


@dataclass(frozen=True, slots=True)
class CloudKeys:
    """What opens the services that hold sandboxes elsewhere; None for what the environment does not say."""

    e2b: str | None = field(default=None, repr=False)
    daytona: str | None = field(default=None, repr=False)

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> CloudKeys:
        """Take them from E2B_API_KEY and DAYTONA_API_KEY; blank counts as absent."""
        return cls(**{name: environ.get(f"{name.upper()}_API_KEY", "").strip() or None for name in cls.__slots__})
