"""Routes of the analyzer's keys: list, make, activate. The operator's only; no private half leaves.

A rotation is: make (pending), pin its public half at nodes and shuffler, activate. The key before
it opens what was issued under it and is erased when the last such batch is acknowledged.
"""

from fastapi import APIRouter, Depends

from riffle.coordinator.access import Service, authorized
from riffle.coordinator.threads import in_thread
from riffle.coordinator.views import KeysView, KeyView

router = APIRouter(prefix="/v1/keys", dependencies=[Depends(authorized)])


@router.get("")
async def list_keys(service: Service) -> KeysView:
    """All keys there ever were, oldest first."""
    found = await in_thread(service.desk.keys.records)
    return KeysView(keys=[KeyView.model_validate(key, from_attributes=True) for key in found])


@router.post("", status_code=201)
async def make_key(service: Service) -> KeyView:
    """Make a pending key, or tell of the one that is pending."""
    made = await in_thread(service.desk.keys.make)
    return KeyView.model_validate(made, from_attributes=True)


@router.post("/{key_id}/activate")
async def activate_key(key_id: str, service: Service) -> KeyView:
    """Seal new batches to a pending key; what was active expires."""
    active = await in_thread(service.desk.keys.activate, key_id)
    await in_thread(service.desk.erase_keys)
    return KeyView.model_validate(active, from_attributes=True)
