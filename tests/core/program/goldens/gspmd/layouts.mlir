// the order of dimensions in memory, asked for and left to the compiler
module @f attributes {mhlo.num_partitions = 8 : i32, mhlo.num_replicas = 1 : i32} {
  func.func public @main(%arg0: tensor<8x8xf32> {mhlo.layout_mode = "{0,1}", mhlo.sharding = "{devices=[2,1,4]<=[8] last_tile_dim_replicate}", tf.aliasing_output = 0 : i32}, %arg1: tensor<8x8xf32> {jax.buffer_donor = true, mhlo.layout_mode = "auto", mhlo.sharding = "{devices=[2,1,4]<=[8] last_tile_dim_replicate}"}) -> (tensor<8x8xf32> {mhlo.layout_mode = "{0,1}", mhlo.sharding = "{devices=[2,1,4]<=[8] last_tile_dim_replicate}"}, tensor<8x8xf32> {mhlo.layout_mode = "auto", mhlo.sharding = "{devices=[2,1,4]<=[8] last_tile_dim_replicate}"}) {
    return %arg0, %arg1 : tensor<8x8xf32>, tensor<8x8xf32>
  }
}
