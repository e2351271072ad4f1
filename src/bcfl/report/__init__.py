"""Looking at runs: the HTML page, figures for papers, tables, and the live view."""

import importlib.util

PACKAGES = {"report": ("matplotlib",), "tracking": ("tensorboard", "mlflow", "sqlalchemy", "alembic")}


def require(*packages: str) -> None:
    """Nothing happens if these optional packages are there; otherwise one line says how to get them."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        extra = next(extra for extra, names in PACKAGES.items() if missing[0] in names)
        raise ValueError(f"this needs {' and '.join(missing)}, which is not installed: pip install 'bcfl[{extra}]'")
