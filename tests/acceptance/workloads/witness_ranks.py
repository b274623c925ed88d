"""Collectives of a witness question, under torchrun. In: numbers for each rank. Out: what rank 0 has then."""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # torchrun sets it to this folder

from workloads import backend


def main(words: str) -> None:
    question = json.loads(words)
    dist.init_process_group(backend())
    rank, world = dist.get_rank(), dist.get_world_size()
    if torch.cuda.is_available():
        torch.cuda.set_device(rank)
    on = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
    own = torch.tensor(question["numbers"][rank], dtype=torch.float32, device=on)
    total, highest, root = own.clone(), own.clone(), own.clone()
    dist.all_reduce(total)
    dist.all_reduce(highest, op=dist.ReduceOp.MAX)
    dist.broadcast(root, src=question["root"])
    parts = [torch.empty_like(own) for _ in range(world)]
    dist.all_gather(parts, own)
    if rank == 0:
        found = {"total": total, "highest": highest, "root": root, "parts": torch.stack(parts)}
        print(json.dumps({name: tensor.tolist() for name, tensor in found.items()}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
