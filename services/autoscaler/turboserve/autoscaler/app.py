"""Assembles an autoscaler over any provider and starts it in the service runner.

Several processes may share a pool. Then one leads, and each term has a pool, a controller and a provider of
its own: the next leader adopts the workers that it finds.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from turboserve.autoscaler import metrics
from turboserve.autoscaler.core import Pool
from turboserve.autoscaler.identities import WorkerNames
from turboserve.autoscaler.pool_term import UNSHARED, PoolTerm
from turboserve.autoscaler.providers.base import PoolProvider
from turboserve.autoscaler.settings import AutoscalerSettings
from turboserve.autoscaler.shell import Shell
from turboserve.autoscaler.status import is_ready
from turboserve.contracts.leading import pool_leader
from turboserve.ids import new_id
from turboserve.leadership import Leadership
from turboserve.service import Runtime
from turboserve.term_leader import TermLeader

STOP_GRACE_S = 3.5
"""Grace period of workers at a stop, in seconds. It fits into the five seconds that a service has to stop."""

MakeProvider = Callable[[], PoolProvider]
OnShell = Callable[[Shell], None]


def shell_of(
    runtime: Runtime, settings: AutoscalerSettings, provider: PoolProvider, term: PoolTerm = UNSHARED
) -> Shell:
    """Return the shell of a new pool; its caller starts it."""
    names = WorkerNames(settings.worker_identities, lambda: pool.workers())
    pool = Pool(settings.pool_name, names.new, settings.policy())
    return Shell(runtime, pool, provider, settings, term)


class PoolLead(TermLeader[Shell]):
    """The leadership of this process, and the autoscaler that runs while this process leads."""

    def __init__(
        self, runtime: Runtime, settings: AutoscalerSettings, make_provider: MakeProvider, on_shell: OnShell
    ) -> None:
        leadership = Leadership(new_id("asl"), settings.leadership())
        super().__init__(runtime, pool_leader(settings.pool_name), leadership)
        self._settings, self._make_provider, self._on_shell = settings, make_provider, on_shell

    @property
    def useful(self) -> bool:
        """Whether this process leads a pool that is ready, or stands by while another process leads."""
        if self.running is not None:
            return is_ready(self.running.pool, self.running.provider.managed)
        return self.leadership.followed

    def of_term(self, term: int) -> Shell:
        """Return the autoscaler of a term that this process has won."""
        leads = partial(self.leadership.leads_in, term)
        fence = PoolTerm(self._settings.pool_name, term, leads, partial(self.on_leadership_lost, term))
        shell = shell_of(self.runtime, self._settings, self._make_provider(), fence)
        self._on_shell(shell)
        return shell


async def start(
    runtime: Runtime,
    settings: AutoscalerSettings,
    make_provider: MakeProvider,
    on_shell: OnShell = lambda shell: None,
) -> None:
    """Start an autoscaler. `on_shell` is called with each shell before any of its tasks runs.

    With `pool_shared`, this process is one of several, of which one runs the pool. Raises ValueError if the
    lease's times are out of order.
    """
    if settings.pool_shared:
        lead = PoolLead(runtime, settings, make_provider, on_shell)
        runtime.check("pool", lambda: lead.useful)
        runtime.role = lambda: lead.role
        metrics.leads.add(lead, lambda lead: {settings.pool_name: int(lead.role == "leader")})
        runtime.on_stop(lead.leave)
        runtime.spawn(lead.run(), "lead")
        return
    shell = shell_of(runtime, settings, make_provider())
    on_shell(shell)
    runtime.check("pool", lambda: is_ready(shell.pool, shell.provider.managed))
    runtime.on_stop(lambda: shell.stop(settings.pool_stop_with_autoscaler, STOP_GRACE_S))
    await shell.start()
