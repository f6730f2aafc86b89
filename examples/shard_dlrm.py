"""Shard a DLRM by the access statistics of your own data loader.

Run it in one process, ``python examples/shard_dlrm.py``, or in two, ``torchrun --nproc-per-node 2
examples/shard_dlrm.py``. Replace the model and the loader by your own; the four lines marked with
an arrow are specific to OPER.
"""

import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torchrec.datasets.utils import Batch
from torchrec.models.dlrm import DLRM, DLRMTrain
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import oper  # <--

ROWS = {"user": 50_000, "item": 20_000, "city": 300}
B = 256


def loader(num_batches: int, seed: int):
    """Yield synthetic clicks with skewed ids, 0 to 3 per bag."""
    random = torch.Generator().manual_seed(seed)
    for _ in range(num_batches):
        lengths = torch.randint(0, 4, (len(ROWS) * B,), generator=random)
        ids = [(n * torch.rand(int(k), generator=random) ** 4).long()
               for n, k in zip(ROWS.values(), lengths.view(len(ROWS), B).sum(1), strict=True)]
        kjt = KeyedJaggedTensor(list(ROWS), torch.cat(ids), lengths=lengths)
        dense = torch.rand(B, 4, generator=random)
        yield Batch(dense, kjt, labels=(dense.sum(1) > 2).long())


def main() -> None:
    if "WORLD_SIZE" in os.environ:  # set by torchrun
        dist.init_process_group("gloo")
    rank = dist.get_rank() if dist.is_initialized() else 0
    torch.manual_seed(0)
    tables = [EmbeddingBagConfig(name=f"t_{f}", num_embeddings=n, embedding_dim=16,
                                 feature_names=[f]) for f, n in ROWS.items()]
    dlrm = DLRMTrain(DLRM(EmbeddingBagCollection(tables, device=torch.device("meta")), 4,
                          [32, 16], [32, 1]))

    stats = oper.collect((b.sparse_features for b in loader(50, seed=1)), dlrm)  # <--
    dlrm = oper.shard(dlrm, stats, batch_size=B,  # <--
                      optimizer=oper.RowWiseAdagrad(lr=0.02))  # <--

    model = DistributedDataParallel(dlrm) if dist.is_initialized() else dlrm
    dense = torch.optim.Adagrad(model.parameters(), lr=0.01)  # the tables update in backward
    for step, batch in enumerate(loader(20, seed=2 + rank)):
        dense.zero_grad()
        loss, _ = model(batch)
        loss.backward()
        dense.step()
        if rank == 0 and step % 5 == 0:
            print(f"step {step:2d}  loss {loss.item():.4f}")
    if dist.is_initialized():
        # torch may hang if DistributedDataParallel outlives the process group, or if a gloo thread
        # still references a tensor: delete the model first, then synchronize all ranks.
        del model, dlrm, dense, loss
        dist.monitored_barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
