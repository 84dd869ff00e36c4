// ordering tokens come first, and count where a result is named by position
module @f attributes {mhlo.num_partitions = 8 : i32, mhlo.num_replicas = 1 : i32} {
  func.func public @main(%arg0: !stablehlo.token {jax.token = true}, %arg1: tensor<8x8xf32> {mhlo.sharding = "{devices=[2,1,4]<=[8] last_tile_dim_replicate}", tf.aliasing_output = 1 : i32}) -> (!stablehlo.token {jax.token = true}, tensor<8x8xf32> {mhlo.sharding = "{devices=[2,1,4]<=[8] last_tile_dim_replicate}"}) {
    return %arg0, %arg1 : !stablehlo.token, tensor<8x8xf32>
  }
}
