// ordering tokens come first, and count where a result is named by position
module @f attributes {mhlo.num_partitions = 8 : i32, mhlo.num_replicas = 1 : i32} {
  sdy.mesh @mesh = <["x"=2, "y"=4]>
  func.func public @main(%arg0: !stablehlo.token {jax.token = true}, %arg1: tensor<8x8xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {}]>, tf.aliasing_output = 1 : i32}) -> (!stablehlo.token {jax.token = true}, tensor<8x8xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {}]>}) {
    return %arg0, %arg1 : !stablehlo.token, tensor<8x8xf32>
  }
}
