"""The matrix memory of the scorers: written by every token, read with a query, forgotten by a gate."""

from pallas_kernels.mlstm_chunkwise.api import MLSTMState, mlstm_chunkwise, mlstm_initial_state, mlstm_step

__all__ = ["MLSTMState", "mlstm_chunkwise", "mlstm_initial_state", "mlstm_step"]
