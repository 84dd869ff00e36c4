// names of the module, of results and of axes with letters that MLIR has to escape
module @"_lambda__of_gr\C3\B6\C3\9Fe" attributes {mhlo.num_partitions = 8 : i32, mhlo.num_replicas = 1 : i32} {
  sdy.mesh @mesh = <["a\22b"=8]>
  sdy.mesh @mesh_0 = <["\C3\B6\\"=8]>
  func.func public @main(%arg0: tensor<8xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"a\22b"}]>}) -> (tensor<8xf32> {jax.result_info = "result['w'][\22v\22]", sdy.sharding = #sdy.sharding<@mesh_0, [{"\C3\B6\\"}]>}) {
    return %arg0 : tensor<8xf32>
  }
}
