"""The distribution is `penstock-pipeline`: warn if PyPI's `penstock`, another project with this import name, lies beside it."""

import os
import warnings


def other_distribution_problem() -> str | None:
    """Return a sentence if another distribution named `penstock` is installed in this package's folder, else None."""
    folder = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    if not os.path.isdir(folder):  # in a zip file
        return None
    names = [name for name in os.listdir(folder) if name.startswith("penstock-") and name.endswith(".dist-info")]
    if not names:
        return None
    return (
        f"{folder} has {names[0]}: PyPI's penstock is another project, and its files overwrite those of penstock-pipeline. "
        "Run: pip uninstall -y penstock && pip install --force-reinstall --no-deps penstock-pipeline"
    )


def warn_of_other_distribution() -> None:
    """Warn if another distribution named `penstock` is installed in this package's folder."""
    if problem := other_distribution_problem():
        warnings.warn(problem, stacklevel=3)
