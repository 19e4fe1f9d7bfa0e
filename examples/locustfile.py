"""A sample for Locust. Its users are nodes: they check, lease, run, seal and upload.

    RIFFLE_NODE_...=... locust -f examples/locustfile.py --headless -u 50 -r 10 -t 60s

It reads the settings of a node process (docs/settings.md). Its nodes take the credentials in turn.
User ids are random, so use it only with a network that serves nobody. A batch must be open. Each of
Locust's users waits for an answer before it goes on (a closed loop), and all seal in one thread.
`riffle load` is an open loop, and distinguishes its own limit from the server's.
"""

import itertools
import secrets
import time

from locust import HttpUser, constant_pacing, task

from riffle.common.protocol.descriptor import SignedDescriptor
from riffle.common.protocol.wire import (
    OCTETS,
    LeaseReply,
    LeaseRequest,
    OpenBatches,
    UploadReply,
    frame,
)
from riffle.node_client.episode import slot_report
from riffle.node_client.pipeline import Job
from riffle.node_client.sealing import seal_reports
from riffle.node_client.settings import Settings
from riffle.node_client.trust import accept

SETTINGS = Settings.load()
ENVIRONMENT = SETTINGS.make_environment()
DEMANDS = SETTINGS.demands(ENVIRONMENT)
CREDENTIALS = itertools.cycle(SETTINGS.credentials())


class Node(HttpUser):
    """A node that tries to send a report a second."""

    host = SETTINGS.shuffler_url
    wait_time = constant_pacing(1)

    def on_start(self) -> None:
        """Takes the next credential."""
        self.client.headers["Authorization"] = f"Bearer {next(CREDENTIALS).token}"
        self.client.verify = str(SETTINGS.ca_file) if SETTINGS.ca_file else True
        self.job: Job | None = None

    @task
    def report(self) -> None:
        """Sends one user's report, if a batch has room."""
        self.job = self.job or self.open_job()
        if self.job is None:
            return
        path = f"/v1/batches/{self.job.batch.batch_id}"
        request = LeaseRequest(users=(secrets.token_hex(16),))
        answer = self.client.post(
            f"{path}/leases", data=request.model_dump_json(), name="lease", timeout=60
        )
        leases = LeaseReply.model_validate_json(answer.content).leases if answer.ok else ()
        if not leases:
            self.job = None
            return
        messages = slot_report(self.job.batch, ENVIRONMENT, leases[0].slot)[1]
        body = frame(leases[0].lease, seal_reports(self.job.keys, messages[None]))
        with self.client.post(
            f"{path}/reports",
            data=body,
            headers={"Content-Type": OCTETS},
            name="upload",
            timeout=60,
            catch_response=True,
        ) as upload:
            if upload.ok:
                outcome = UploadReply.model_validate_json(upload.content).results[0].outcome
                if outcome != "accepted":
                    upload.failure(outcome)

    def open_job(self) -> Job | None:
        """Returns the oldest open batch, if this node accepts its descriptor."""
        answer = self.client.get("/v1/batches?accepting=1&wait=5", name="poll", timeout=60)
        batches = OpenBatches.model_validate_json(answer.content).batches if answer.ok else ()
        for batch in batches[:1]:
            path = f"/v1/batches/{batch.batch_id}"
            descriptor = self.client.get(path, name="descriptor", timeout=60)
            signed = SignedDescriptor.model_validate_json(descriptor.content)
            return Job.of(accept(signed, batch.batch_id, DEMANDS, time.time()))
        return None
