"""Link loads of the exchanges between owners, readers and holders of copies."""

from __future__ import annotations

import numpy as np

from oper.search.problem.machine import Machine, Term

_IN = Term.LINK_IN, Term.CROSS_IN, Term.RACK_IN
_OUT = Term.LINK_OUT, Term.CROSS_OUT, Term.RACK_OUT


def owner_exchange(m: Machine, out: np.ndarray, amount: np.ndarray, message: np.ndarray,
                   receives: bool = False) -> None:
    """Add the bytes that every owner sends to each rank outside its domain or, with `receives`,
    that each of these ranks sends to it from its own memory.

    Args:
        out: float64 [..., 9, W], units by term and rank; added to in place.
        amount: float64 [..., W], bytes between owner o and each rank of the same host.
        message: float64 [..., W], bytes between owner o and each rank of another host.
    """
    on_host = m.elsewhere_on_host(amount)
    out[..., Term.MEMORY, :] += (on_host + m.other_hosts(amount) if receives else
                                 amount * (m.world_size - m.num_domain))
    own, others = (_IN, _OUT) if receives else (_OUT, _IN)
    out[..., own[0], :] += amount * (m.num_host - m.num_domain)
    out[..., own[1], :] += message * (m.world_size - m.num_host)
    out[..., others[0], :] += on_host
    out[..., others[1], :] += m.other_hosts(message)
    if m.has_racks:
        out[..., own[2], :] += message * (m.world_size - m.num_rack)
        out[..., others[2], :] += m.other_racks(message)


def broadcast(m: Machine, out: np.ndarray, sent: np.ndarray, amount: np.ndarray,
              holds: np.ndarray) -> None:
    """Add the bytes of changed rows that masters send to all copies.

    The master writes the copies in other domains.

    Args:
        out: float64 [..., 9, W], units of the update phase by term and rank; added to in place.
        sent: float64 [..., 9, W], units of the phase in which hosts send changed rows; likewise.
        amount: float64 [..., W], bytes of changed rows by master.
        holds: float64 [W], 1 if a rank has a copy, else 0.
    """
    near, host, every = m.domain_sum(holds), m.host_sum(holds), holds.sum()
    # Ranks of a domain with several copies read the domain's changed rows and write their own copy.
    out[..., Term.MEMORY, :] += 2 * m.domain_sum(amount) * holds * (near > 1)
    out[..., Term.LINK_OUT, :] += amount * (host - near)
    sent[..., Term.CROSS_OUT, :] += amount * (every - host)
    on_host, afar = m.elsewhere_on_host(amount) * holds, m.other_hosts(amount) * holds
    out[..., Term.LINK_IN, :] += on_host
    sent[..., Term.CROSS_IN, :] += afar
    out[..., Term.MEMORY, :] += on_host + afar
    if m.has_racks:
        sent[..., Term.RACK_OUT, :] += amount * (every - m.rack_sum(holds))
        sent[..., Term.RACK_IN, :] += m.other_racks(amount) * holds


def subset_reads(m: Machine, out: np.ndarray, ranks: tuple[int, ...], need: np.ndarray) -> None:
    """Add the bytes that ranks without a copy in their domain read from the nearest copies.

    Args:
        out: float64 [9, W], units by term and rank; added to in place.
        ranks: the ranks that have copies.
        need: (bytes read from a copy on the same host, bytes read from a copy on another host).
    """
    row, message = need
    holds = np.isin(np.arange(m.world_size), ranks).astype(float)
    near, host = m.domain_sum(holds), m.host_sum(holds)
    from_host = ((near == 0) & (host > 0)).astype(float)
    from_afar = (host == 0).astype(float)
    out[Term.LINK_IN] += row * from_host
    out[Term.CROSS_IN] += message * from_afar
    sent_host = row * m.host_sum(from_host) / np.maximum(host, 1.0) * holds
    asked_afar = from_afar.sum() / holds.sum() * holds
    out[Term.LINK_OUT] += sent_host
    out[Term.CROSS_OUT] += message * asked_afar
    out[Term.MEMORY] += sent_host + row * asked_afar
    if m.has_racks:  # copies of all hosts send the same amount
        out[Term.RACK_IN] += message * from_afar * m.other_racks(holds) / holds.sum()
        out[Term.RACK_OUT] += message * m.other_racks(from_afar) / holds.sum() * holds


def transfer(out: np.ndarray, amount: np.ndarray, message: np.ndarray, machine: Machine,
             reads_source: bool = True) -> None:
    """Add bytes between ranks of different domains to units of a phase.

    Args:
        out: float64 [9, W], the units.
        amount: float64 [W, W], bytes by source and destination, which use links between domains
            of the same host; bytes within a domain use no link.
        message: float64 [W, W], bytes by source and destination on links between hosts.
        reads_source: whether `amount` is also read from the source's memory, for any host.
    """
    host = machine.host[:, None] == machine.host[None, :]
    far = machine.domain[:, None] != machine.domain[None, :]
    out[Term.LINK_OUT] += (amount * (far & host)).sum(axis=1)
    out[Term.LINK_IN] += (amount * (far & host)).sum(axis=0)
    out[Term.CROSS_OUT] += (message * ~host).sum(axis=1)
    out[Term.CROSS_IN] += (message * ~host).sum(axis=0)
    rack = machine.rack[:, None] == machine.rack[None, :]
    out[Term.RACK_OUT] += (message * ~rack).sum(axis=1)
    out[Term.RACK_IN] += (message * ~rack).sum(axis=0)
    if reads_source:
        out[Term.MEMORY] += (amount * far).sum(axis=1)
