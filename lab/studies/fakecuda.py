"""Import before torch: a torch without CUDA then runs autograd on FakeTensors whose device is cuda."""

from memkern.planner import fake_cuda

fake_cuda.install()
