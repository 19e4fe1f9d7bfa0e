"""A sample for Locust: its users are nodes, which check, lease, run, seal and upload.

    RIFFLE_NODE_...=... locust -f deploy/locustfile.py --headless -u 50 -r 10 -t 60s

Configured as a node process is (docs/settings.md); the credentials are dealt out in turn, and user
ids are invented, so point it only at a network that serves nobody. A batch must be open. Each of
Locust's users is a closed loop, which waits for its answer before it goes on, and all seal in one
thread; `riffle load` is an open loop, and tells its own limit from the server's.
"""

import itertools
import secrets
import time

from locust import HttpUser, constant_pacing, task

from riffle.common.protocol.descriptor import SignedDescriptor
from riffle.common.protocol.messages import (
    OCTETS,
    LeaseReply,
    LeaseRequest,
    OpenBatches,
    UploadReply,
    frame,
)
from riffle.node_client.episode import slot_report
from riffle.node_client.pipeline import Job
from riffle.node_client.sealing import pack, seal_reports
from riffle.node_client.settings import Settings
from riffle.node_client.trust import accept

SETTINGS = Settings.load()
ENVIRONMENT = SETTINGS.make_environment()
DEMANDS = SETTINGS.demands(ENVIRONMENT)
CREDENTIALS = itertools.cycle(SETTINGS.credentials())


class Node(HttpUser):
    """One node; a report a second, if it can."""

    host = SETTINGS.shuffler_url
    wait_time = constant_pacing(1)

    def on_start(self) -> None:
        """Take a credential."""
        self.client.headers["Authorization"] = f"Bearer {next(CREDENTIALS).token}"
        self.client.verify = str(SETTINGS.ca_file) if SETTINGS.ca_file else True
        self.job: Job | None = None

    @task
    def report(self) -> None:
        """One user's report, if a batch has room."""
        self.job = self.job or self.checked()
        if self.job is None:
            return
        path, wanted = f"/v1/batches/{self.job.batch_id}", LeaseRequest(users=(new_user(),))
        answer = self.client.post(
            f"{path}/leases", data=wanted.model_dump_json(), name="lease", timeout=60
        )
        leases = LeaseReply.model_validate_json(answer.content).leases if answer.ok else ()
        if not leases:
            self.job = None
            return
        messages = slot_report(self.job.batch, ENVIRONMENT, leases[0].slot)[1]
        body = frame(leases[0].lease, seal_reports(self.job.keys, pack(messages)))
        with self.client.post(
            f"{path}/reports",
            data=body,
            headers={"Content-Type": OCTETS},
            name="upload",
            timeout=60,
            catch_response=True,
        ) as stored:
            if stored.ok:
                outcome = UploadReply.model_validate_json(stored.content).results[0].outcome
                if outcome != "accepted":
                    stored.failure(outcome)

    def checked(self) -> Job | None:
        """The oldest open batch, if this node accepts its descriptor."""
        answer = self.client.get("/v1/batches?accepting=1&wait=5", name="poll", timeout=60)
        open_ones = OpenBatches.model_validate_json(answer.content).batches if answer.ok else ()
        for batch in open_ones[:1]:
            path = f"/v1/batches/{batch.batch_id}"
            found = self.client.get(path, name="descriptor", timeout=60)
            signed = SignedDescriptor.model_validate_json(found.content)
            return Job.of(accept(signed, batch.batch_id, DEMANDS, time.time()))
        return None


def new_user() -> str:
    """The id of somebody who was never asked."""
    return secrets.token_hex(16)
