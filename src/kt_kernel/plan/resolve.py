"""From what a user typed to a model that can be planned: of its folder, or of the registry."""

from dataclasses import dataclass
from pathlib import Path

from kt_kernel import settings
from kt_kernel.errors import UserError
from kt_kernel.plan.model import PlannedModel, model_of_folder
from kt_kernel.registry.find import DEMO, Found, find


@dataclass(frozen=True)
class Resolved:
    found: Found
    model: PlannedModel
    folder: Path  # where it is, or would be downloaded to
    default_method: str | None


def planned(text: str) -> Resolved:
    """The demo model is made for it: that is what it is for. UserError where there is nothing to plan."""
    return planned_of(find(text))


def planned_of(found: Found) -> Resolved:
    if found.name == DEMO and found.path is None:
        from kt_kernel.demo import DemoError, demo_model

        try:
            folder = demo_model()
        except DemoError as error:
            raise UserError(str(error)) from None
        return Resolved(found, model_of_folder(DEMO, folder), folder, None)
    default = found.known.method if found.known else None
    if found.path is not None:
        folder = found.path if found.path.is_dir() else found.path.parent
        return Resolved(found, model_of_folder(found.name, folder), folder, default)
    if found.known is None or found.known.facts is None:
        raise UserError(
            "{name} is not on this machine, and its sizes are not known: 'kt model download {repo}' brings it",
            name=found.name,
            repo=found.repo,
        )
    return Resolved(found, PlannedModel(found.name, found.known.facts), settings.model_folders()[0], default)
