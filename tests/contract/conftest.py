from contract_world import world

__all__ = ["world"]
