"""Files that usually hold passwords, keys or tokens. They stay out of snapshots; docs/guides/submit.md lists them."""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import PurePath

_SECRET_FILES = (
    ".env", ".env.*", "*.pem", "*.key", "*.p12", "*.pfx", "id_rsa*", "id_dsa*", "id_ecdsa*", "id_ed25519*", ".netrc",
    "_netrc", ".git-credentials", ".pypirc", ".npmrc", ".pgpass", ".htpasswd", "credentials*.json",
    "service-account*.json", "kaggle.json",
)  # fmt: skip
# Matched by the end of the path: the name alone is too common.
_SECRET_PATHS = (".docker/config.json", ".huggingface/token", "huggingface/token", ".config/gh/hosts.yml")
_SECRET_FOLDERS = frozenset({".aws", ".ssh", ".kube", ".gnupg", ".azure", "gcloud"})
_ALLOWED_FILES = ("*.py", "*.pub", ".env.example", ".env.sample", ".env.template", ".env.dist")


def is_likely_secret(name: str) -> bool:
    """Return whether the file at the path ``name`` usually holds a secret."""
    path = PurePath(name)
    if any(fnmatchcase(path.name, pattern) for pattern in _ALLOWED_FILES):
        return False
    return (
        any(fnmatchcase(path.name, pattern) for pattern in _SECRET_FILES)
        or any(f"/{name}".endswith(f"/{suffix}") for suffix in _SECRET_PATHS)
        or not _SECRET_FOLDERS.isdisjoint(path.parts[:-1])
    )
